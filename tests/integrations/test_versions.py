from __future__ import annotations

import pytest

from burst_portable.errors import UnsupportedError
from burst_portable.integrations.versions import check_version


def test_check_version_compares_numbers():
    check_version("torch", "2.9", "99")  # "2.13" is later than "2.9"
    with pytest.raises(UnsupportedError, match=r"version of torch; got 2\..*; allowed: >=1\.9,<2\.4; pip install \"to"):
        check_version("torch", "1.9", "2.4")
    with pytest.raises(UnsupportedError, match=r"got no such package.*pip install \"burst-portable\[lightning\]\""):
        check_version("lightning-of-nobody", "2.6", "3", extra="lightning")

"""What every kernel of ours is compiled with."""

from __future__ import annotations

# a·b + c in one instruction: Triton's default, of which 3.9 warns that it will be another from 3.10 on.
ALWAYS = {"enable_fp_fusion": True}

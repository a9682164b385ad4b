"""What crossed a GPU's NVLinks, by the counters that the GPU itself keeps."""

from __future__ import annotations

from burst_portable.backends.cuda.nvml import active_links, opened
from burst_portable.errors import BackendUnavailableError, explain

_KIB = 1024


class NvlinkCounters:
    """See `backends.base.LinkCounters`. Each link counts whole KiB, since the driver was loaded.

    Raises `BackendUnavailableError` where the GPU has no link that is up, or its counters cannot be read.
    """

    def __init__(self, uuid: str) -> None:
        self._nvml, self._device = opened(uuid)
        self._links = active_links(self._nvml, self._device)
        try:
            if not self._links:
                raise BackendUnavailableError(
                    explain("this GPU has no NVLink that is up", next_step="`nvidia-smi nvlink --status` tells of them")
                )
            self.read()
        except BackendUnavailableError:
            self.close()
            raise

    def read(self) -> tuple[int, int]:
        nvml, links = self._nvml, self._links
        ways = nvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX, nvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX
        asked = [(way, link) for way in ways for link in links]  # a field without its link would be that of link 0
        try:
            values = nvml.nvmlDeviceGetFieldValues(self._device, asked)
        except nvml.NVMLError as error:
            raise BackendUnavailableError(f"NVML tells no bytes of this GPU's NVLinks: {error}") from error
        for (_, link), value in zip(asked, values, strict=True):
            if value.nvmlReturn != nvml.NVML_SUCCESS:
                why = nvml.nvmlErrorString(value.nvmlReturn)
                raise BackendUnavailableError(f"NVML tells no bytes of this GPU's NVLink {link}: {why}")
        counted = [_KIB * int(value.value.ullVal) for value in values]
        return sum(counted[: len(links)]), sum(counted[len(links) :])

    def close(self) -> None:
        self._nvml.nvmlShutdown()

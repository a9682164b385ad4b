"""Define the CPU backend: gloo, torch's own CPU flash attention, and the reference kernel."""

from burst_portable.backends.cpu.backend import CpuBackend

backend = CpuBackend()

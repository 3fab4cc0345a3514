"""The backend for CPUs."""

from surefoot.backend.cpu.backend import CpuBackend

__all__ = ["CpuBackend"]

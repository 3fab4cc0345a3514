"""Ascend NPU: the vendor's public operators, or a contract emulation of them on the CPU."""

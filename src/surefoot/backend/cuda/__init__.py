"""The backend for CUDA devices."""

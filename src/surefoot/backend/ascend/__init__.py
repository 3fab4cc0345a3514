"""The backend for Ascend devices."""

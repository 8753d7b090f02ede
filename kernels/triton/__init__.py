"""The operations as Triton programs for NVIDIA GPUs; `backend` binds them, `programs/` is what runs on the device."""

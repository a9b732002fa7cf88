"""Every seed and noise level of a sweep in one program."""

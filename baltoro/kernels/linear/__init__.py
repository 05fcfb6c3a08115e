"""Products with weights [out, in] for few rows: the reference, and kernels that read each weight once."""

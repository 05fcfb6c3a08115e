"""LoRA: the low-rank terms of adapters beside any base product, for steps that mix adapters."""

"""RMSNorm and the gated norm."""

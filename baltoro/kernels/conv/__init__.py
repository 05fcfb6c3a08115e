"""Short causal depthwise convolution with carried history."""

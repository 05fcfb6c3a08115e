"""Block Attention Residuals: the softmax mix over depth."""

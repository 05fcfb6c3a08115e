"""MXFP4 and MXFP8: pack, unpack, fake quantisation."""

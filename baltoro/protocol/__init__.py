"""Words on the wire: msgspec structs that two rooms exchange but neither owns. No torch, no sockets."""

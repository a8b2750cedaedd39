"""The door by which sequences arrive with KV that was computed elsewhere."""

"""KV import: sequences come in with KV that was computed, or kept, elsewhere."""

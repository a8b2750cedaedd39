"""KV export: after the first token, a sequence's blocks are held and a ticket for them issued."""

"""The door by which sequences leave: prompt in, first token and a ticket for its KV out."""

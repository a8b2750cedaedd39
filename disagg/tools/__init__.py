"""What a person asks beside serving. Nothing here is imported by what serves."""

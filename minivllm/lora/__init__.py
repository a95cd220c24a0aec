"""Low-rank adapters: read from PEFT checkpoints, kept in host memory and device slots, chosen per request."""

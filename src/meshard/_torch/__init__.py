"""Private names of torch, and workarounds for it."""

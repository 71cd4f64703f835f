"""Generation with torch, behind the interface of quartet.engines."""

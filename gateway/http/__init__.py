"""HTTP building blocks that every route shares: errors, pages, request metrics, strict query parameters."""

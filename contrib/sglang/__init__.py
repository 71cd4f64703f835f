"""SGLang servers as a generation engine."""

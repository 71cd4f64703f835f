"""Generated from proto/quartet/v1 by `make proto`. Do not edit."""

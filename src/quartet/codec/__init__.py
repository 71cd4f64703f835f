"""Records as protobuf messages, and messages as validated records."""

"""What a run says of itself: logs, metrics, and the files it leaves."""

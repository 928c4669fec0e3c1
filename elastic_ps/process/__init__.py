"""What each process does about itself: its life, its entrypoint, its HTTP port, its own records."""

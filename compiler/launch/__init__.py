"""Launch targets: what is written into a build's `launch/`, and how runs are started, watched and stopped."""

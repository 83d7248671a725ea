"""Where the parts of a run live: `local` puts all of them into this process and its workers."""

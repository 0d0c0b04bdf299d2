"""Which boxes go from which rank to which, so that no link carries more than it must; pure computation."""

"""One figure or table per file, with its number in the paper; a file dropped here that defines ENTRY is part of it."""

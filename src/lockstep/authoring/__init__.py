"""For those who write the course or hand it out: chapters, the book, the bank, a learner's copy."""

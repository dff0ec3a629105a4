"""Evaluation sets as rows of text, and the teacher-forced scoring of them."""

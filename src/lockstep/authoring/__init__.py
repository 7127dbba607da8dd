"""For those who write the course: chapters and quizzes."""

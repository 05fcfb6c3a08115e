"""Times of single operations on a GPU, beside their floors and their peers."""

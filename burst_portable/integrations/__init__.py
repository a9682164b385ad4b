"""Models that nobody edited, with their sequence split over ranks. Nothing is imported before it is asked for."""

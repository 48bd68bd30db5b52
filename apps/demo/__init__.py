"""Tools that made the demonstration models. They are not part of the installed package."""

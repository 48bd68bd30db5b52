"""How the demonstration models were made: tools of the project, left out of what is installed."""

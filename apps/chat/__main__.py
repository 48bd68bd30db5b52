"""`python -m edge.apps.chat`."""

from edge.apps.chat import main

main()

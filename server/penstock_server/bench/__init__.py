"""`penstock bench`: measures a running server with AIPerf, and plots the result."""

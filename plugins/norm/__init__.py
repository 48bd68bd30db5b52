"""RMSNorm and LayerNorm, alone or with the addition before them and the rounding behind them."""

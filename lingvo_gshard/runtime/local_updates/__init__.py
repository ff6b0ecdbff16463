"""Workers that train alone and seldom exchange weights (DiLoCo, FedAvg)."""

"""An analytic cost model of a sharded training step."""

"""The analytic cost of a partitioned step."""

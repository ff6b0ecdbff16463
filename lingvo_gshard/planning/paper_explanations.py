"""What is assumed where plans are compared with the GShard paper, and why they differ there."""

WEIGHTS = ACTIVATIONS = EQUAL_TOKENS = OWN_BATCH = TRAINED_TOKENS = COST_GROWTH = STEP_GROWTH = (
    ALL_TO_ALL
) = COMPILE_TIME = COMPILE_DEPTH = REMATERIALISATION = ATTENTION = ""
PEAKS = {}
STEPS = {"estimate": "", "bound": ""}
CORE_YEARS = {}

"""Pages of the collection that several rules name, from its top folder."""

AGREE = "recipes/agree.py"
CLIP = "recipes/clip_and_scale.py"
COSTS = "pitfalls/README.md#it-costs-too-much"
ELASTIC = "02_torchrun_elastic.py"
METRICS = "recipes/metrics.py"
SHARE = "exercises/01_share_the_data.py"
SILENT = "pitfalls/README.md#no-error-and-a-wrong-result"

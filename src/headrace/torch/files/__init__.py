"""Models and checkpoints as files.

model.py export.py     safetensors into a volume; out of a checkpoint, without copying
export_folder.py import_folder.py    folders of DCP and safetensors
"""

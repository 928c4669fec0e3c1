"""The operator: turns TrainingJob resources into parameter server and worker pods.

Of `elastic_ps` it imports the modules that describe a job and nothing that loads torch.
"""

from liger_models.distributed.groups import ParallelGroups as ParallelGroups

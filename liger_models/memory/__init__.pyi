from liger_models.memory.estimate import TrainingMemory as TrainingMemory
from liger_models.memory.estimate import training_memory as training_memory
from liger_models.memory.plan import MemoryPlan as MemoryPlan
from liger_models.memory.plan import plan_memory as plan_memory

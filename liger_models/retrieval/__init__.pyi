from liger_models.retrieval.embedder import LigerEmbedder as LigerEmbedder
from liger_models.retrieval.metrics import ndcg as ndcg
from liger_models.retrieval.metrics import ranks_of_targets as ranks_of_targets
from liger_models.retrieval.metrics import recall as recall
from liger_models.retrieval.reranker import LigerReranker as LigerReranker
from liger_models.retrieval.settings import EmbedderSettings as EmbedderSettings
from liger_models.retrieval.settings import RerankerSettings as RerankerSettings

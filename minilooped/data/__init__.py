"""Text -> tokens -> batches. The names that the rest of the package uses are served from here."""

from .corpus import BatchStream as BatchStream
from .corpus import Corpus as Corpus
from .corpus import eval_windows as eval_windows
from .corpus import load_corpus as load_corpus
from .storage import digest as digest
from .storage import same_tokens as same_tokens
from .tasks import Task as Task
from .tasks import baselines as baselines
from .tasks import cycle_hops as cycle_hops
from .tasks import p_hop as p_hop
from .tasks import permutations as permutations
from .texts import prepare as prepare
from .tokenizers import BPETokenizer as BPETokenizer
from .tokenizers import CharTokenizer as CharTokenizer
from .tokenizers import Tokenizer as Tokenizer
from .tokenizers import check_same_tokenizer as check_same_tokenizer
from .tokenizers import embedded as embedded
from .tokenizers import tokenizer_from_spec as tokenizer_from_spec

__version__: str

from .engine.engine import Engine as Engine
from .engine.generate import Generation as Generation
from .engine.generate import Statistics as Statistics
from .engine.loading import Loading as Loading
from .engine.options import EngineOptions as EngineOptions
from .engine.reply import Reply as Reply
from .engine.requests.request import Ending as Ending
from .engine.requests.request import Finish as Finish
from .engine.requests.request import Piece as Piece
from .engine.requests.request import Request as Request
from .engine.sampling_settings import SamplingSettings as SamplingSettings
from .engine.session import Session as Session
from .errors import ContextFullError as ContextFullError
from .errors import ModelError as ModelError
from .families.config import Config as Config
from .families.placement import Placement as Placement
from .files.demo import demo_model as demo_model
from .files.gguf import Gguf as Gguf
from .files.gguf import Tensor as Tensor
from .memory.draft_settings import DraftSettings as DraftSettings
from .memory.session_settings import SessionSettings as SessionSettings
from .text.chat import ChatTemplate as ChatTemplate
from .text.chat import Message as Message
from .text.tokenizer import Tokenizer as Tokenizer
